"""The steps on the device: decoding (draft, verify, commit) and prefill, their graphs, and the drafters."""
