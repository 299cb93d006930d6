"""The jobs in a step: an engine plus the algorithm that uses it. No distribution code here."""
