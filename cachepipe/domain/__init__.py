"""Decisions without side effects: no network, disk, clock, torch, boto3 or click."""
