"""What runs in the interpreter that has verifiers. These files import nothing of whet."""
