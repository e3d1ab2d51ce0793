"""Preparing a process for a backend: before its framework is imported, wholly, once, or not at all."""
