"""Scores cache pages for the newest queries by a softened bound on their attention."""
