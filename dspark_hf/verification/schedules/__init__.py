"""Schedules: how many draft tokens each row asks for and verifies."""
