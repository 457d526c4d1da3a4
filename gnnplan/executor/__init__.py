"""Trains for real with torch. Never imported by the planner or the simulator."""
