"""Peer groups, a module for each kind: who the ranks are, what they see and where they meet."""
