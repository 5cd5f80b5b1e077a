@0xd1a9c54b7e0f3a62;

# What AMem processes of one user say to each other over Unix sockets (SOCK_SEQPACKET, one message a packet).
#
# A connection begins with hello and welcome; `purpose` says what may follow. Descriptors travel beside a `shared` message, in
# the order of its items. New kinds of message go to the end of the union and raise the protocol version
# (messages.h); a new field's default means the old behaviour.

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("amem::wire");

struct Identity {
  session @0 :UInt64;
  host @1 :Text;
  pid @2 :Int32;
  group @3 :Int64;
  rank @4 :Int32 = -1;
  keeps @5 :Bool;
}

struct Properties {  # AllocationProperties, whole
  type @0 :UInt32;
  handleTypes @1 :UInt32;
  locationType @2 :UInt32;
  locationId @3 :Int32;
  compression @4 :UInt8;
  gpuDirectRdma @5 :UInt8;
  usage @6 :UInt16;
  reserved @7 :UInt32;
}

struct Outcome {  # a Status
  code @0 :UInt8;
  driverResult @1 :Int32;
  message @2 :Text;
}

struct Hello {
  version @0 :UInt32;         # the newest protocol that the sender speaks
  leastVersion @1 :UInt32;    # the oldest
  purpose @2 :UInt8;          # Purpose in messages.h
  self @3 :Identity;
  to @4 :UInt64;              # the session that the sender means to talk to
}

struct Welcome {
  version @0 :UInt32;         # spoken from here on
  self @1 :Identity;
}

struct Import {
  as @0 :UInt64;
  token @1 :Data;             # 64 bytes, token.h
}

struct Reference {
  allocation @0 :UInt64;      # the owner's id
  as @1 :UInt64;              # the importer's id
}

struct SharedItem {
  bytes @0 :UInt64;
  properties @1 :Properties;
  slab @2 :UInt64;       # not 0: a part of that allocation, which is imported by itself, and no descriptor
  slabSecret @3 :Data;
  offset @4 :UInt64;
  tag @5 :UInt8;         # MemoryTag; without it NCCL's
  incarnation @6 :UInt64;  # of a multicast object: how often its owner has made it anew
  standsIn @7 :Bool;       # it is a piece of ordinary memory now
  pool @8 :Text;           # the tag of the owner's pool that it is a chunk of; empty: of none
  poolPolicy @9 :UInt8;    # PoolPolicy of that
}

struct Neighbourhood {
  self @0 :Identity;
  neighbours @1 :List(Identity);
  lifecycle @2 :UInt8;        # Lifecycle; 0: not said
  cycle @3 :UInt64;
  lost @4 :Identity;          # whose end failed its last call, which it has not repeated; no session: nobody's
}

struct Arrive {
  kind @0 :UInt8;             # CycleKind
  cycle @1 :UInt64;
  set @2 :List(Identity);     # as the sender sees it now; a later message replaces it
  leftMs @3 :UInt32;          # until the sender's deadline; 0: not said
  tag @4 :Text;               # whose memory it is about; empty: NCCL's
}

struct Begun {
  round @0 :UInt64;
  members @1 :List(Identity);
  leftMs @2 :UInt32;          # of the member that has the least; 0: not said
}

struct Vote {
  round @0 :UInt64;
  index @1 :UInt32;           # votes of one round count from 1
  phase @2 :UInt8;            # PhaseKind
  leftMs @3 :UInt32;          # how long the sender waits
  outcome @4 :Outcome;
}

struct Decision {
  round @0 :UInt64;
  index @1 :UInt32;
  culprit @2 :UInt64;
  outcome @3 :Outcome;
}

struct Order {                # Order in requests.h
  request @0 :UInt64;
  ask @1 :UInt8;
  stage @2 :UInt8;
  allTags @3 :Bool;
  target @4 :UInt64;
  byPid @5 :Int32;
  toldFirst @6 :UInt64;
}

struct Standing {             # Standing in requests.h
  steps @0 :UInt64;
  lastStepNs @1 :UInt64;
  ownPause @2 :UInt8;
  phase @3 :UInt8;
  stageDone @4 :UInt8;
  about @5 :UInt64;
  at @6 :UInt64;
  atNs @7 :UInt64;
  failure @8 :Outcome;
  freed @9 :UInt64;
  held @10 :UInt64;
  asked @11 :Order;
  lastRequest @12 :UInt64;
}

struct Message {
  request @0 :UInt64;         # a reply carries its request's number
  union {
    hello @1 :Hello;
    welcome @2 :Welcome;
    failure @3 :Outcome;
    import @4 :Import;
    reimport @5 :List(Reference);
    shared @6 :List(SharedItem);
    dropped @7 :List(Reference);
    askNeighbours @8 :Text;   # a tag; empty: about NCCL's memory
    neighbourhood @9 :Neighbourhood;
    arrive @10 :Arrive;
    begun @11 :Begun;
    withdraw @12 :Void;       # before a round has begun: "do not count me"
    withdrawn @13 :List(Identity);  # done; these had not arrived
    vote @14 :Vote;
    decision @15 :Decision;
    leave @16 :UInt64;        # the sender is through with that round
    order @17 :Order;
    look @18 :Void;
    standing @19 :Standing;
    note @20 :Data;           # an event, as in journals
  }
}
