"""Anthropic's Messages API: /v1/messages and the paths below it, translated to chat completions and back."""
