"""`pagefleet operate`: watches InferenceServices and all that belongs to them, and wakes one reconcile for each."""
