"""Finding the first wrong number: captures of what modules compute, and what they tell when compared."""
