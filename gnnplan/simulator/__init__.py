"""Plays schedules in virtual time. Holds no strategy code."""
