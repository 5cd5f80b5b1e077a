// What libibverbs and its callers have in common in memory, as far as AMem reads or writes it. It has been the same since 2005
// (symbol version IBVERBS_1.1); tests/ncclpatch/intercept/cards_test.cpp compares it with the header where there is one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace amem::intercept::verbs {

struct Context;
struct Pair;

struct Device {
  void* operations[2];
  int node_type, transport_type;
  char name[64];
};
struct Domain {
  Context* context;
  std::uint32_t handle;
};
struct Region {  // ibv_mr
  Context* context;
  Domain* domain;
  void* address;
  std::size_t bytes;
  std::uint32_t handle, local_key, remote_key;
};
struct Queue {  // of completions
  Context* context;
};
struct Pair {  // ibv_qp
  Context* context;
  void* own;
  Domain* domain;
  Queue *sends, *receives;
  void* shared_receives;
  std::uint32_t handle, number;
};
struct PairWanted {  // ibv_qp_init_attr
  void* own;
  Queue *sends, *receives;
  void* shared_receives;
  std::uint32_t capacities[5];
  int type;
  int signals_all;
};
struct Part {  // ibv_sge
  std::uint64_t address;
  std::uint32_t bytes, local_key;
};
struct Send {  // ibv_send_wr
  std::uint64_t id;
  Send* next;
  Part* parts;
  int count;
  int opcode;
  unsigned flags;
  std::uint32_t immediate;
  std::uint64_t remote_address;
  std::uint32_t remote_key;
};
inline constexpr int kReads = 4;                                 // of opcode: from the remote address
inline constexpr unsigned kSignaled = 1 << 1, kInline = 1 << 3;  // of flags
struct Receive {                                                 // ibv_recv_wr
  std::uint64_t id;
  Receive* next;
};
struct Completion {  // ibv_wc
  std::uint64_t id;
  int status;
  int opcode;  // not set if the status is a failure
  std::uint32_t vendor_error, bytes, immediate, number, remote_number;
  unsigned flags;
  std::uint16_t key_index, local_id;
  std::uint8_t level, path;
};
inline constexpr int kReceived = 1 << 7;  // a bit of the opcode

using PollQueue = int(Queue*, int most, Completion*);
using PostSend = int(Pair*, Send*, Send** bad);
using PostReceive = int(Pair*, Receive*, Receive** bad);
struct Context {
  Device* device;
  void* before[11];
  PollQueue* poll;
  void* between[13];
  PostSend* send;
  PostReceive* receive;
};

struct Functions {  // of a context, those that AMem replaces
  PollQueue* poll = nullptr;
  PostSend* send = nullptr;
  PostReceive* receive = nullptr;

  static Functions Of(const Context& context) { return {context.poll, context.send, context.receive}; }
  void SetIn(Context& context) const {
    context.poll = poll;
    context.send = send;
    context.receive = receive;
  }
};

}  // namespace amem::intercept::verbs
