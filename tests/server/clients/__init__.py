"""Programs that use other people's clients, each run by test_real_clients.py in an environment of its own.

They take the server's address and the model's name, and fail as scripts do. Only what they import is theirs:
nothing of ours is in their environment.
"""
