"""What IPU users really have: SDKs, Lightning versions, strategies and options of every year."""
