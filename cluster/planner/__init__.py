"""What a recipe needs on N cards: memory, time, and the layout that is quickest."""
