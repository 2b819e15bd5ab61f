"""Random programs that two engines run on the same data."""
