"""The contracts: Protocols that plugins implement, and the small records that belong to them."""
