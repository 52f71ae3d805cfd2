PEERS={}
Peer=object
