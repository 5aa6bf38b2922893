"""Verification: acceptance rules, step costs and schedules; no model inside."""
