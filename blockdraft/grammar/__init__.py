"""Forms that an answer must have, kept to while it is decoded; llguidance reads them and makes the masks."""
