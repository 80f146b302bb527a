"""The published failures of tensor-parallel plans and settings, each a small model with a bad and a good case."""
