// NCCL's net_ib over libibverbs, which it looks up as NCCL does; and nccl-rdma-sharp's in mode ib, which is a copy of that.
// Keys are read from a region at each use, and regions are shared by those who register the same pages. The receiver writes
// into a list of the sender's where its buffer is and under which key; the sender writes the data there, and the last request
// has immediate data, which completes a receive without memory.
#include "tests/stand_ins/nccl/net.h"

#if __has_include(<infiniband/verbs.h>)
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

// In the header these are macros around inline functions.
#undef ibv_reg_mr
#undef ibv_reg_mr_iova2

namespace stand_in {
namespace {

constexpr int kOk = 0, kSystemError = 2, kInternalError = 3, kRemoteError = 6;
constexpr std::uint64_t kPage = 4096, kMostRequests = 32;
constexpr int kOneRequest = 8192;  // above, the immediate data comes in a request of its own
constexpr unsigned kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

#ifdef STAND_IN_IMPORTS_VERBS  // as nccl-rdma-sharp does
#define VERB(name) decltype(::name)* const name = &::name
#define NEWER_VERB(name, version) VERB(name)
#else
template <class Function>
Function* Find(const char* name, const char* version = "IBVERBS_1.1") {
  static void* const library = ::dlopen("libibverbs.so.1", RTLD_NOW);
  return library == nullptr ? nullptr : reinterpret_cast<Function*>(::dlvsym(library, name, version));
}
#define VERB(name) decltype(::name)* const name = Find<decltype(::name)>(#name)
#define NEWER_VERB(name, version) decltype(::name)* const name = Find<decltype(::name)>(#name, version)
#endif

struct Verbs {
  VERB(ibv_get_device_list);
  VERB(ibv_free_device_list);
  VERB(ibv_open_device);
  VERB(ibv_alloc_pd);
  VERB(ibv_reg_mr);
  NEWER_VERB(ibv_reg_mr_iova2, "IBVERBS_1.8");
  NEWER_VERB(ibv_reg_dmabuf_mr, "IBVERBS_1.12");
  VERB(ibv_dereg_mr);
  VERB(ibv_create_cq);
  VERB(ibv_destroy_cq);
  VERB(ibv_create_qp);
  VERB(ibv_modify_qp);
  VERB(ibv_destroy_qp);
};
const Verbs& TheVerbs() {
  static const Verbs verbs;
  return verbs;
}

// ---- the device, and what is registered with it

struct Cached {
  std::uint64_t address = 0, bytes = 0;
  ibv_mr* region = nullptr;
  int uses = 0;
};
struct Device {
  ibv_context* context = nullptr;
  ibv_pd* domain = nullptr;
  std::mutex guard;
  std::vector<Cached> cache;
};
Device& TheDevice() {
  static Device& device = *new Device;
  return device;
}

struct MrHandle {
  ibv_mr* region = nullptr;
};

int Init(void*) {
  Device& device = TheDevice();
  const std::lock_guard lock(device.guard);
  const Verbs& verbs = TheVerbs();
  if (device.domain != nullptr) return kOk;
  if (verbs.ibv_get_device_list == nullptr || verbs.ibv_reg_dmabuf_mr == nullptr) return kSystemError;
  int count = 0;
  ibv_device** const devices = verbs.ibv_get_device_list(&count);
  if (count > 0) device.context = verbs.ibv_open_device(devices[0]);
  verbs.ibv_free_device_list(devices);
  if (device.context == nullptr) return kSystemError;
  device.domain = verbs.ibv_alloc_pd(device.context);
  return device.domain == nullptr ? kSystemError : kOk;
}

template <class Make>
int Cache(void* data, std::size_t bytes, void** handle, const Make& make) {
  Device& device = TheDevice();
  const auto begin = reinterpret_cast<std::uint64_t>(data) & ~(kPage - 1);
  const std::uint64_t whole = (reinterpret_cast<std::uint64_t>(data) + bytes - begin + kPage - 1) & ~(kPage - 1);
  const std::lock_guard lock(device.guard);
  const auto holds = [&](const Cached& one) { return one.address <= begin && begin + whole <= one.address + one.bytes; };
  auto known = std::ranges::find_if(device.cache, holds);
  if (known == device.cache.end()) {
    ibv_mr* const region = make(reinterpret_cast<void*>(begin), whole);
    if (region == nullptr) {
      std::perror("stand-in net_ib: a registration failed");
      return kSystemError;
    }
    known = device.cache.insert(known, {begin, whole, region, 0});
  }
  ++known->uses;
  *handle = new MrHandle{known->region};
  return kOk;
}

int RegMr(void*, void* data, std::size_t bytes, int type, void** handle) {
  const Verbs& verbs = TheVerbs();
  return Cache(data, bytes, handle, [&](void* address, std::size_t whole) {
    ibv_pd* const domain = TheDevice().domain;
    if (type == kHostMemory) return verbs.ibv_reg_mr(domain, address, whole, kAccess);
    return verbs.ibv_reg_mr_iova2(domain, address, whole, reinterpret_cast<std::uint64_t>(address),
                                  kAccess | IBV_ACCESS_RELAXED_ORDERING);
  });
}

int RegMrDmaBuf(void*, void* data, std::size_t bytes, int, std::uint64_t offset, int descriptor, void** handle) {
  return Cache(data, bytes, handle, [&](void* address, std::size_t whole) {
    return TheVerbs().ibv_reg_dmabuf_mr(TheDevice().domain, offset, whole, reinterpret_cast<std::uint64_t>(address), descriptor,
                                        static_cast<int>(kAccess));
  });
}

int DeregMr(void*, void* handle) {
  Device& device = TheDevice();
  auto* const mine = static_cast<MrHandle*>(handle);
  const std::lock_guard lock(device.guard);
  const auto known = std::ranges::find(device.cache, mine->region, &Cached::region);
  if (known == device.cache.end()) return kInternalError;
  if (--known->uses == 0) {
    if (TheVerbs().ibv_dereg_mr(known->region) != 0) {
      ++known->uses;
      return kSystemError;
    }
    device.cache.erase(known);
  }
  delete mine;
  return kOk;
}

// ---- connections

struct Request {
  struct Endpoint* of = nullptr;  // null: it is free
  int events = 0, bytes = 0;
};

// What the receiver writes into the sender's list. The index comes last: when it is there, all is.
struct Wanted {
  std::uint64_t address = 0;
  std::uint32_t key = 0, bytes = 0;
  std::array<std::uint64_t, 5> unused{};
  std::uint64_t index = 0;
};
using List = std::array<Wanted, kMostRequests>;

struct Endpoint {
  ibv_cq* queue = nullptr;
  ibv_qp* pair = nullptr;
  std::array<Request, kMostRequests> requests;
  List list;  // of a sender: what the receiver wants; of a receiver: what is being written there
  ibv_mr* of_list = nullptr;
  std::uint64_t next = 0;
  // Of a receiver:
  std::uint64_t list_there = 0;
  std::uint32_t list_key = 0;
  ibv_qp* flushes = nullptr;
  int flushed = 0;
  ibv_mr* of_flushed = nullptr;

  Request* Free() {
    const auto found = std::ranges::find(requests, static_cast<Endpoint*>(nullptr), &Request::of);
    return found == requests.end() ? nullptr : &*found;
  }
  std::uint64_t NumberOf(const Request* request) const { return static_cast<std::uint64_t>(request - requests.data()); }
};

struct Hello {
  std::uint32_t pair = 0, list_key = 0;
  std::uint64_t list = 0;
};

ibv_qp* MakePair(ibv_cq* queue) {
  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = queue;
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap = {2 * kMostRequests, kMostRequests, 1, 1, sizeof(Wanted)};
  return TheVerbs().ibv_create_qp(TheDevice().domain, &wanted);
}

bool ConnectPair(ibv_qp* pair, std::uint32_t peer) {
  for (const ibv_qp_state state : {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS}) {
    ibv_qp_attr attributes{};
    attributes.qp_state = state;
    attributes.dest_qp_num = peer;
    const int mask = state == IBV_QPS_RTR ? IBV_QP_STATE | IBV_QP_DEST_QPN : IBV_QP_STATE;
    if (TheVerbs().ibv_modify_qp(pair, &attributes, mask) != 0) return false;
  }
  return true;
}

Endpoint* MakeEndpoint(bool receives) {
  const Verbs& verbs = TheVerbs();
  Device& device = TheDevice();
  auto* const made = new Endpoint;
  made->queue = verbs.ibv_create_cq(device.context, 4 * kMostRequests, nullptr, nullptr, 0);
  made->pair = MakePair(made->queue);
  made->of_list = verbs.ibv_reg_mr(device.domain, &made->list, sizeof made->list, static_cast<int>(kAccess));
  if (!receives) return made;
  made->flushes = MakePair(made->queue);
  made->of_flushed = verbs.ibv_reg_mr(device.domain, &made->flushed, sizeof made->flushed, IBV_ACCESS_LOCAL_WRITE);
  ConnectPair(made->flushes, made->flushes->qp_num);
  return made;
}

int Close(void* endpoint) {
  const Verbs& verbs = TheVerbs();
  auto* const mine = static_cast<Endpoint*>(endpoint);
  for (ibv_qp* const pair : {mine->pair, mine->flushes})
    if (pair != nullptr) verbs.ibv_destroy_qp(pair);
  for (ibv_mr* const region : {mine->of_list, mine->of_flushed})
    if (region != nullptr) verbs.ibv_dereg_mr(region);
  verbs.ibv_destroy_cq(mine->queue);
  delete mine;
  return kOk;
}

Hello HelloOf(const Endpoint& endpoint) {
  return {endpoint.pair->qp_num, endpoint.of_list->rkey, reinterpret_cast<std::uint64_t>(&endpoint.list)};
}

std::pair<sockaddr_un, socklen_t> AddressOf(const char* name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::size_t length = std::min(std::strlen(name), sizeof address.sun_path - 1);
  std::memcpy(address.sun_path + 1, name, length);  // abstract: leaves no file behind
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length)};
}

struct Listening {
  int socket = -1;
};
int Listen(int, void* handle, void** listening) {
  const auto [address, length] = AddressOf(static_cast<NetHandle*>(handle)->name);
  const int made = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (::bind(made, reinterpret_cast<const sockaddr*>(&address), length) != 0 || ::listen(made, 1) != 0) {
    ::close(made);
    return kSystemError;
  }
  *listening = new Listening{made};
  return kOk;
}
int CloseListen(void* listening) {
  auto* const mine = static_cast<Listening*>(listening);
  ::close(mine->socket);
  delete mine;
  return kOk;
}

struct Connecting {
  int socket = -1;
  Endpoint* endpoint = nullptr;
};
int Connect(int, void* handle, void** sending, void**) {
  auto& to = *static_cast<NetHandle*>(handle);
  *sending = nullptr;
  if (to.connecting == nullptr) {
    const auto [address, length] = AddressOf(to.name);
    const int made = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (::connect(made, reinterpret_cast<const sockaddr*>(&address), length) != 0) return ::close(made), kOk;  // not yet
    Endpoint* const endpoint = MakeEndpoint(false);
    to.connecting = new Connecting{made, endpoint};
    const Hello own = HelloOf(*endpoint);
    if (::send(made, &own, sizeof own, MSG_NOSIGNAL) != sizeof own) return kRemoteError;
  }
  auto* const connecting = static_cast<Connecting*>(to.connecting);
  Hello theirs;
  if (::recv(connecting->socket, &theirs, sizeof theirs, MSG_DONTWAIT) != sizeof theirs) return kOk;
  const bool connected = ConnectPair(connecting->endpoint->pair, theirs.pair);
  *sending = connecting->endpoint;
  ::close(connecting->socket);
  delete connecting;
  to.connecting = nullptr;
  return connected ? kOk : kSystemError;
}

int Accept(void* listening, void** receiving, void**) {
  *receiving = nullptr;
  const int accepted = ::accept4(static_cast<Listening*>(listening)->socket, nullptr, nullptr, SOCK_CLOEXEC);
  if (accepted < 0) return kOk;
  Hello theirs;
  int result = ::recv(accepted, &theirs, sizeof theirs, 0) == sizeof theirs ? kOk : kRemoteError;
  if (result == kOk) {
    Endpoint* const endpoint = MakeEndpoint(true);
    endpoint->list_there = theirs.list;
    endpoint->list_key = theirs.list_key;
    const Hello own = HelloOf(*endpoint);
    const bool connected = ConnectPair(endpoint->pair, theirs.pair);
    if (!connected || ::send(accepted, &own, sizeof own, MSG_NOSIGNAL) != sizeof own) result = kSystemError;
    *receiving = endpoint;
  }
  ::close(accepted);
  return result;
}

// ---- transfers

int Post(ibv_qp* pair, ibv_send_wr* work) {
  ibv_send_wr* bad = nullptr;
  return ibv_post_send(pair, work, &bad) == 0 ? kOk : kSystemError;
}

int ISend(void* sending, void* data, int bytes, int, void* handle, void** request) {
  auto& endpoint = *static_cast<Endpoint*>(sending);
  *request = nullptr;
  Wanted& wanted = endpoint.list.at(endpoint.next % kMostRequests);
  if (std::atomic_ref(wanted.index).load(std::memory_order_acquire) != endpoint.next + 1) return kOk;
  Request* const made = endpoint.Free();
  if (made == nullptr) return kOk;
  ibv_sge part{reinterpret_cast<std::uint64_t>(data), static_cast<std::uint32_t>(bytes),
               static_cast<MrHandle*>(handle)->region->lkey};
  std::array<ibv_send_wr, 2> work{};
  for (ibv_send_wr& one : work) {
    one.wr_id = endpoint.NumberOf(made);
    one.wr.rdma = {wanted.address, wanted.key};
    one.imm_data = static_cast<std::uint32_t>(bytes);
    one.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    one.send_flags = IBV_SEND_SIGNALED;
  }
  work[0].sg_list = &part;
  work[0].num_sge = 1;
  if (bytes > kOneRequest) {
    work[0].opcode = IBV_WR_RDMA_WRITE;
    work[0].send_flags = 0;
    work[0].next = &work[1];
  }
  *made = {&endpoint, 1, bytes};
  if (const int posted = Post(endpoint.pair, work.data()); posted != kOk) return made->of = nullptr, posted;
  ++endpoint.next;
  *request = made;
  return kOk;
}

int IRecv(void* receiving, int, void** data, int* bytes, int*, void** handles, void** request) {
  auto& endpoint = *static_cast<Endpoint*>(receiving);
  *request = nullptr;
  Request* const made = endpoint.Free();
  if (made == nullptr) return kOk;
  ibv_recv_wr receive{}, *bad = nullptr;
  receive.wr_id = endpoint.NumberOf(made);
  if (ibv_post_recv(endpoint.pair, &receive, &bad) != 0) return kSystemError;
  const std::uint64_t slot = endpoint.next % kMostRequests;
  Wanted& wanted = endpoint.list.at(slot);
  wanted = {reinterpret_cast<std::uint64_t>(data[0]),
            static_cast<MrHandle*>(handles[0])->region->rkey,
            static_cast<std::uint32_t>(bytes[0]),
            {},
            endpoint.next + 1};
  ibv_sge part{reinterpret_cast<std::uint64_t>(&wanted), sizeof wanted, endpoint.of_list->lkey};
  ibv_send_wr work{};
  work.wr_id = endpoint.NumberOf(made);
  work.sg_list = &part;
  work.num_sge = 1;
  work.opcode = IBV_WR_RDMA_WRITE;
  // One in so many is signaled, so that the send queue does not fill up.
  work.send_flags = IBV_SEND_INLINE | (slot == 0 ? unsigned{IBV_SEND_SIGNALED} : 0U);
  work.wr.rdma = {endpoint.list_there + slot * sizeof wanted, endpoint.list_key};
  *made = {&endpoint, slot == 0 ? 2 : 1, 0};
  if (const int posted = Post(endpoint.pair, &work); posted != kOk) return made->of = nullptr, posted;
  ++endpoint.next;
  *request = made;
  return kOk;
}

// A read of what has arrived, after which the GPU sees it.
int IFlush(void* receiving, int, void** data, int* bytes, void** handles, void** request) {
  auto& endpoint = *static_cast<Endpoint*>(receiving);
  *request = nullptr;
  Request* const made = bytes[0] == 0 ? nullptr : endpoint.Free();
  if (made == nullptr) return kOk;
  ibv_sge part{reinterpret_cast<std::uint64_t>(&endpoint.flushed), 1, endpoint.of_flushed->lkey};
  ibv_send_wr work{};
  work.wr_id = endpoint.NumberOf(made);
  work.sg_list = &part;
  work.num_sge = 1;
  work.opcode = IBV_WR_RDMA_READ;
  work.send_flags = IBV_SEND_SIGNALED;
  work.wr.rdma = {reinterpret_cast<std::uint64_t>(data[0]), static_cast<MrHandle*>(handles[0])->region->rkey};
  *made = {&endpoint, 1, 0};
  if (const int posted = Post(endpoint.flushes, &work); posted != kOk) return made->of = nullptr, posted;
  *request = made;
  return kOk;
}

int Test(void* request, int* done, int* bytes) {
  auto& mine = *static_cast<Request*>(request);
  Endpoint& endpoint = *mine.of;
  *done = 0;
  for (;;) {
    if (mine.events == 0) {
      *done = 1;
      if (bytes != nullptr) *bytes = mine.bytes;
      mine.of = nullptr;
      return kOk;
    }
    std::array<ibv_wc, 4> completions{};
    const int polled = ibv_poll_cq(endpoint.queue, static_cast<int>(completions.size()), completions.data());
    if (polled <= 0) return polled == 0 ? kOk : kSystemError;
    for (const ibv_wc& one : std::span(completions).first(static_cast<std::size_t>(polled))) {
      if (one.status != IBV_WC_SUCCESS) {
        std::fprintf(stderr, "stand-in net_ib: a request of queue pair %u ended with status %d\n", one.qp_num, one.status);
        return kRemoteError;
      }
      Request& completed = endpoint.requests.at(one.wr_id);
      if (one.opcode == IBV_WC_RECV_RDMA_WITH_IMM) completed.bytes = static_cast<int>(one.imm_data);
      --completed.events;
    }
  }
}

int Devices(int* count) {
  *count = 1;
  return kOk;
}
int Nothing(int, void*) { return kOk; }

template <class Call>
double TimeOf(const Call& call) {
  constexpr int kRounds = 40, kCalls = 50'000;
  double least = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    const auto from = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) call();
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - from;
    least = std::min(least, took.count() / kCalls);
  }
  return least;
}

}  // namespace

double TimeOfPoll(void* connection) {
  ibv_cq* const queue = static_cast<Endpoint*>(connection)->queue;
  return TimeOf([queue] {
    ibv_wc none;
    ibv_poll_cq(queue, 1, &none);
  });
}

double TimeOfPost(void* connection) {
  ibv_qp* const pair = MakePair(static_cast<Endpoint*>(connection)->queue);
  ibv_send_wr work{}, *bad = nullptr;
  work.send_flags = IBV_SEND_SIGNALED;
  const double took = TimeOf([&] { ibv_post_send(pair, &work, &bad); });
  TheVerbs().ibv_destroy_qp(pair);
  return took;
}

const NetTable kNetIb = {"IB",  Init,  Devices, Nothing, Listen, Connect, Accept,      RegMr,   RegMrDmaBuf, DeregMr,
                         ISend, IRecv, IFlush,  Test,    Close,  Close,   CloseListen, nullptr, nullptr};

}  // namespace stand_in
#else  // built without Debian's libibverbs-dev
const stand_in::NetTable stand_in::kNetIb = {};
double stand_in::TimeOfPoll(void*) { return 0; }
double stand_in::TimeOfPost(void*) { return 0; }
#endif
