"""The memory of running sequences: keys and values, recurrent states, sampling tables."""
