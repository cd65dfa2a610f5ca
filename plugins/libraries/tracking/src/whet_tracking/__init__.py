"""What loggers of experiment trackers share: tables, histograms, and catching up after a kill."""
