"""Data files: records of many formats, mixed and tokenised into batches."""
