"""The two machines of a pair, in a world where what is under way comes in any order."""
