"""The APIs: fields of requests become questions to the engine, and its answers become JSON and events."""
