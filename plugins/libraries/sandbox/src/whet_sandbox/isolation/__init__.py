"""The program beside the driver that isolates programs. It imports the standard library only, and never whet."""
