"""The command `whet env`: Python environments for engines that need one of their own."""
