"""EVOKE's retention policy for LMCache. Nothing is implemented yet; see the README."""
