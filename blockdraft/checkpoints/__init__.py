"""From files to parameters: where checkpoints are found, how they are read and unpacked."""
