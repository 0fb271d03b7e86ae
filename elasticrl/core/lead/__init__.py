"""What a leader decides: who trains, who is kept out, and the next plan."""
