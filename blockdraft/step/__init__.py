"""One decoding step on the device: draft, verify, commit; prefill; graphs; the drafters."""
