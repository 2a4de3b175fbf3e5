"""The planning problem in numbers, and what a decision does to it."""
