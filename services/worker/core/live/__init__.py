"""What the two members of a pair decide (live scaling), pure."""
