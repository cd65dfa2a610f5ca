"""What training backends share: layouts, micro-batches, the loop over a loss, schedules, exported files."""
