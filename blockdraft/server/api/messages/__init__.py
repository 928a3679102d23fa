"""Anthropic's Messages API: /v1/messages and what lies below it, translated to chat completions and back."""
