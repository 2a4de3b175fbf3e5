"""Rules of operators on ragged batches."""
