"""A run of whet as a run of Trackio, kept on this machine or in a Space."""
