"""What is done with what was found: rules name the boxes of the dataflow, and a plan is written."""
