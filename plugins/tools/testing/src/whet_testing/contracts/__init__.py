"""The conformance kit: inherit a contract class, override `make`, and every rule of the interface is a test."""
