"""Devices behind one seam: the ``Driver`` protocol and its implementations."""
