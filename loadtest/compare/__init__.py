"""Translators of several generations, side by side on one page."""
