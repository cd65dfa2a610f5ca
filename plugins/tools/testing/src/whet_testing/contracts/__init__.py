"""The contracts: inherit a contract class and override `make`. Each rule of the interface is then a test."""
