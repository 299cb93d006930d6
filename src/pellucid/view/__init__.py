"""The local dashboard: `pellucid view` shows runs in the browser while they train and afterwards.

Run directories ─► `runs.py` (what is in them) ─► `figures.py`, `pages.py` (what is shown) ─► `app.py` (HTTP).
"""
