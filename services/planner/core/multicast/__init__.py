"""Who gets the weights of a model from whom: topology, multicast, and the chains that workers carry out."""
