"""Structured output: llguidance reads schemas and grammars, and masks the tokens that they forbid."""
