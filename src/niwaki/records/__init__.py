"""What was done, as data: records, comparisons, progress and how numbers are written. No torch."""
