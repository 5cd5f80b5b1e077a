// The stand-in card: regions, queues and queue pairs of this process, and the threads that move bytes between processes.
//
// It enforces what a card does: a key is random, belongs to one registration and is never used again; a request that uses a key
// which is not registered, one of another protection domain or a range beyond its region ends with an error and is a finding;
// requests of a pair are carried out in order, and a write with immediate data waits for a receive. AMEM_SIM_CARDS says how
// many there are (1 to 8, default 1); they share these rules and one queue. A transfer into or out of memory that was mapped
// anew under a living registration is a finding.
//
// Findings go, a line each, to the file in AMEM_SIM_CARD_FINDINGS, or to standard error. Faults, comma separated, by
// AMEM_SIM_CARD_FAULTS, and while the process runs by amem_card_fault: register=N (the N-th next registration of GPU memory
// fails), deregister=N, kill-register=N and kill-deregister=N (the process is killed there), late=US (each request waits so
// long), ack=US (each is told to have ended so much later than it has), down (no request ends well). late=0, ack=0, down=0 end
// those.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/stand_ins/verbs/gpu.h"
#include "tests/stand_ins/verbs/wire.h"

namespace amem::card {

struct Region : ibv_mr {
  std::unique_ptr<Pages> pages;  // null: host memory
  std::uint64_t iova = 0;        // the address that requests use
  int pin = -1;                  // a duplicate of the dma-buf's descriptor
};

struct Queue : ibv_cq {
  std::mutex guard;
  std::deque<ibv_wc> completions;
};

struct Request {  // a copy of what was posted
  ibv_send_wr work{};
  ibv_sge part{};
  const ibv_pd* domain = nullptr;  // of the pair, compared and never read
  std::vector<std::byte> inlined;
  bool signaled = false;
};

struct Message {
  Header header;
  std::vector<std::byte> payload;
  int from = -1;  // the connection that it came by
};

struct Pair : ibv_qp {
  std::uint32_t peer = 0;
  bool signals_all = false;
  std::deque<std::uint64_t> receives;  // posted, by their ids
  std::deque<Message> held;            // until a receive is posted
};

struct Counts {
  std::uint64_t gpu_bytes = 0, gpu_regions = 0;          // registered now
  std::uint64_t registrations = 0, deregistrations = 0;  // of GPU memory, ever
  std::uint64_t requests = 0, findings = 0;
};

// Of the process; never destroyed, because NCCL's threads use it up to the end. All methods from any thread.
class Card {
 public:
  static Card& Get();

  ibv_mr* Register(ibv_pd* domain, std::uint64_t address, std::uint64_t bytes, std::uint64_t iova, int descriptor);
  int Deregister(Region* region);
  Pair* MakePair(ibv_pd* domain, const ibv_qp_init_attr& wanted);
  void DestroyPair(Pair* pair);
  void Connect(Pair* pair, const ibv_qp_attr& attributes, int mask);
  int Send(Pair* pair, ibv_send_wr* work, ibv_send_wr** bad);
  int Receive(Pair* pair, ibv_recv_wr* work, ibv_recv_wr** bad);
  static int Poll(Queue* queue, int most, ibv_wc* completions);
  Counts Count();
  void Plan(const char* faults);

 private:
  struct Sent {  // and not answered
    std::uint32_t pair = 0;
    std::uint64_t id = 0;
    ibv_wc_opcode opcode{};
    bool signaled = false;
  };
  struct Link {  // to another card
    int fd = -1;
    std::uint64_t next_ticket = 1;
    std::map<std::uint64_t, Sent> sent;
  };

  Card();
  void SendLoop();
  void AckLoop();
  void ReceiveLoop(int listening);
  void ReadFrom(int fd);
  void CarryOut(std::uint32_t pair, Request request);
  std::uint32_t Gather(Request& request, std::vector<std::byte>& payload);
  std::uint32_t ReadHere(const Request& request);
  std::uint32_t Access(const ibv_pd* domain, std::uint32_t key, bool remote, std::uint64_t address, void* host,
                       std::size_t bytes, bool write);
  Link* LinkTo(std::uint32_t card);
  void Deliver(Message message);
  bool Apply(Pair& pair, Message& message);
  void Answer(const Message& message, std::uint32_t status);
  void Complete(const Sent& sent, std::uint32_t status);
  void Broken(int fd);
  void Find(const std::string& what);
  std::uint32_t NewKey();
  bool Fault(const std::string& name);

  std::recursive_mutex mutex_;  // guards all but the sockets' streams
  std::mt19937 random_{std::random_device{}()};
  std::set<std::uint32_t> used_keys_;
  std::map<std::uint32_t, Region*> by_lkey_, by_rkey_;
  std::map<std::uint32_t, Pair*> pairs_;
  std::map<std::uint32_t, Link> links_;
  std::deque<std::pair<std::uint32_t, Request>> to_send_;
  std::deque<std::pair<std::chrono::steady_clock::time_point, ibv_wc>> to_tell_;  // and when they ended
  std::condition_variable_any work_;
  std::map<std::string, int> faults_;
  Counts counts_;
  std::uint32_t number_ = 0, next_pair_ = 1;
  int epoll_ = -1, listening_ = -1;
};

}  // namespace amem::card
