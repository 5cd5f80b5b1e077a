#include "tests/stand_ins/verbs/card.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <sstream>

namespace amem::card {
namespace {

using Clock = std::chrono::steady_clock;

ibv_wc_opcode OpcodeOf(ibv_wr_opcode opcode) { return opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE; }

void Push(Queue& queue, const ibv_wc& completion) {
  const std::lock_guard lock(queue.guard);
  queue.completions.push_back(completion);
}

}  // namespace

Card& Card::Get() {
  static Card& card = *new Card;
  return card;
}

Card::Card() {
  if (const char* const faults = std::getenv("AMEM_SIM_CARD_FAULTS")) Plan(faults);
  listening_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  for (number_ = 1;; ++number_) {  // the first number that no process of this network has
    const auto [name, length] = NameOfCard(number_);
    if (::bind(listening_, reinterpret_cast<const sockaddr*>(&name), length) == 0) break;
    if (errno != EADDRINUSE) std::abort();
  }
  epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  epoll_event accepts{EPOLLIN, {}};
  accepts.data.fd = listening_;
  if (::listen(listening_, 256) != 0 || ::epoll_ctl(epoll_, EPOLL_CTL_ADD, listening_, &accepts) != 0) std::abort();
  std::thread([this] { ReceiveLoop(listening_); }).detach();
  std::thread([this] { SendLoop(); }).detach();
  std::thread([this] { AckLoop(); }).detach();
}

void Card::Find(const std::string& what) {
  ++counts_.findings;
  const char* const path = std::getenv("AMEM_SIM_CARD_FINDINGS");
  const std::string line = "card of process " + std::to_string(::getpid()) + ": " + what + "\n";
  const int fd = path == nullptr ? -1 : ::open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  static_cast<void>(!::write(fd < 0 ? STDERR_FILENO : fd, line.data(), line.size()));
  if (fd >= 0) ::close(fd);
}

std::uint32_t Card::NewKey() {
  for (;;) {
    const std::uint32_t key = static_cast<std::uint32_t>(random_()) | 1U;
    if (used_keys_.insert(key).second) return key;
  }
}

void Card::Plan(const char* text) {
  const std::lock_guard lock(mutex_);
  std::stringstream faults(text);
  for (std::string one; std::getline(faults, one, ',');) {
    const std::size_t equals = one.find('=');
    faults_[one.substr(0, equals)] = equals == std::string::npos ? 1 : std::atoi(one.c_str() + equals + 1);
  }
  work_.notify_all();
}

// Whether the fault happens now: it counts down to its call.
bool Card::Fault(const std::string& name) {
  const auto counted = [this](const std::string& wanted) {
    const auto at = faults_.find(wanted);
    return at != faults_.end() && at->second > 0 && --at->second == 0;
  };
  if (counted("kill-" + name)) ::kill(::getpid(), SIGKILL);
  return counted(name);
}

// ---- regions
// -----------------------------------------------------------------------------------------------------------------

ibv_mr* Card::Register(ibv_pd* domain, std::uint64_t address, std::uint64_t bytes, std::uint64_t iova, int descriptor) {
  auto region = std::make_unique<Region>();
  // Without the lock: the driver may wait for a kernel that waits for this card.
  const auto refused = Pages::Open(address, bytes, descriptor, region->pages);
  const std::lock_guard lock(mutex_);
  if (refused) {
    Find("a registration was refused: " + *refused);
    errno = EFAULT;
    return nullptr;
  }
  if (region->pages != nullptr) {
    if (Fault("register")) {
      errno = ENOMEM;
      return nullptr;
    }
    ++counts_.gpu_regions;
    ++counts_.registrations;
    counts_.gpu_bytes += bytes;
  }
  region->context = domain->context;
  region->pd = domain;
  region->addr = reinterpret_cast<void*>(address);
  region->length = bytes;
  region->lkey = NewKey();
  region->rkey = NewKey();
  region->iova = iova;
  if (descriptor >= 0) region->pin = ::fcntl(descriptor, F_DUPFD_CLOEXEC, 3);
  by_lkey_[region->lkey] = by_rkey_[region->rkey] = region.get();
  return region.release();
}

int Card::Deregister(Region* region) {
  std::unique_ptr<Region> ended;
  {
    const std::lock_guard lock(mutex_);
    const auto key = std::ranges::find_if(by_lkey_, [&](const auto& one) { return one.second == region; });
    if (key == by_lkey_.end()) {
      Find("a region is deregistered that is not registered");
      return EINVAL;
    }
    if (region->pages != nullptr) {
      if (Fault("deregister")) return EBUSY;
      if (!region->pages->StillMapped()) Find("memory was mapped anew under a region that was registered until now");
      --counts_.gpu_regions;
      ++counts_.deregistrations;
      counts_.gpu_bytes -= region->length;
    }
    // By the region and not by its keys: their owner may have written others there.
    by_lkey_.erase(key);
    std::erase_if(by_rkey_, [&](const auto& one) { return one.second == region; });
    ended.reset(region);
  }
  if (ended->pin >= 0) ::close(ended->pin);
  return 0;  // and without the lock the second mapping goes
}

// Reads or writes a part of a region for a pair of that protection domain; a work completion's status.
std::uint32_t Card::Access(const ibv_pd* domain, std::uint32_t key, bool remote, std::uint64_t address, void* host,
                           std::size_t bytes, bool write) {
  const std::lock_guard lock(mutex_);  // nobody deregisters it meanwhile
  const auto& keys = remote ? by_rkey_ : by_lkey_;
  const auto wrong = remote ? IBV_WC_REM_ACCESS_ERR : IBV_WC_LOC_PROT_ERR;
  const auto at = keys.find(key);
  const std::string name = std::string(remote ? "remote" : "local") + " key " + std::to_string(key);
  if (at == keys.end()) {
    Find(name + (used_keys_.contains(key) ? " is used after its region was deregistered" : " belongs to no region"));
    return wrong;
  }
  Region& region = *at->second;
  if (region.pd != domain) {
    Find(name + " belongs to another protection domain");
    return wrong;
  }
  if (address < region.iova || address - region.iova > region.length || bytes > region.length - (address - region.iova)) {
    Find(name + " is used for a range beyond its region");
    return wrong;
  }
  const std::uint64_t offset = address - region.iova;
  if (region.pages == nullptr) {
    auto* const place = static_cast<std::byte*>(region.addr) + offset;
    write ? std::memcpy(place, host, bytes) : std::memcpy(host, place, bytes);
    return IBV_WC_SUCCESS;
  }
  if (!region.pages->StillMapped()) {
    Find(name + " is used for memory that was mapped anew since it was registered");
    return wrong;
  }
  if (write ? region.pages->Write(offset, host, bytes) : region.pages->Read(offset, host, bytes)) return IBV_WC_SUCCESS;
  Find(name + ": the driver refused to copy");
  return IBV_WC_GENERAL_ERR;
}

// ---- pairs
// -------------------------------------------------------------------------------------------------------------------

Pair* Card::MakePair(ibv_pd* domain, const ibv_qp_init_attr& wanted) {
  const std::lock_guard lock(mutex_);
  auto* const pair = new Pair;
  pair->context = domain->context;
  pair->qp_context = wanted.qp_context;
  pair->pd = domain;
  pair->send_cq = wanted.send_cq;
  pair->recv_cq = wanted.recv_cq;
  pair->qp_num = number_ << kPairBits | next_pair_++;
  pair->state = IBV_QPS_RESET;
  pair->qp_type = wanted.qp_type;
  pair->signals_all = wanted.sq_sig_all != 0;
  pairs_[pair->qp_num] = pair;
  return pair;
}

void Card::DestroyPair(Pair* pair) {
  const std::lock_guard lock(mutex_);
  pairs_.erase(pair->qp_num);
  delete pair;
}

void Card::Connect(Pair* pair, const ibv_qp_attr& attributes, int mask) {
  const std::lock_guard lock(mutex_);
  if ((mask & IBV_QP_STATE) != 0) pair->state = attributes.qp_state;
  if ((mask & IBV_QP_DEST_QPN) != 0) pair->peer = attributes.dest_qp_num;
}

int Card::Send(Pair* pair, ibv_send_wr* work, ibv_send_wr** bad) {
  const std::lock_guard lock(mutex_);
  for (; work != nullptr; work = work->next) {
    if (work->num_sge > 1 || pair->state != IBV_QPS_RTS) {
      *bad = work;
      return EINVAL;
    }
    Request request{*work, work->num_sge == 1 ? work->sg_list[0] : ibv_sge{}, pair->pd, {}, false};
    request.signaled = pair->signals_all || (work->send_flags & IBV_SEND_SIGNALED) != 0;
    if ((work->send_flags & IBV_SEND_INLINE) != 0 && work->num_sge == 1) {
      const auto* from = reinterpret_cast<const std::byte*>(request.part.addr);
      request.inlined.assign(from, from + request.part.length);
    }
    ++counts_.requests;
    to_send_.emplace_back(pair->qp_num, std::move(request));
  }
  work_.notify_all();
  return 0;
}

int Card::Receive(Pair* pair, ibv_recv_wr* work, ibv_recv_wr** bad) {
  const std::lock_guard lock(mutex_);
  for (; work != nullptr; work = work->next) {
    if (work->num_sge > 0 && work->sg_list[0].length > 0) {  // sends into receives are nothing that NCCL does
      *bad = work;
      return EINVAL;
    }
    pair->receives.push_back(work->wr_id);
  }
  while (!pair->held.empty()) {
    Message message = std::move(pair->held.front());
    pair->held.pop_front();
    if (!Apply(*pair, message)) {
      pair->held.push_front(std::move(message));
      break;
    }
  }
  return 0;
}

int Card::Poll(Queue* queue, int most, ibv_wc* completions) {
  const std::lock_guard lock(queue->guard);
  int polled = 0;
  for (; polled < most && !queue->completions.empty(); ++polled) {
    completions[polled] = queue->completions.front();
    queue->completions.pop_front();
  }
  return polled;
}

Counts Card::Count() {
  const std::lock_guard lock(mutex_);
  return counts_;
}

// ---- sending
// -----------------------------------------------------------------------------------------------------------------

void Card::SendLoop() {
  for (;;) {
    std::pair<std::uint32_t, Request> next;
    {
      std::unique_lock lock(mutex_);
      work_.wait(lock, [this] { return !to_send_.empty(); });
      const auto began = Clock::now();
      const auto due = [&] { return began + std::chrono::microseconds(faults_["late"]); };
      while (Clock::now() < due()) work_.wait_until(lock, due());
      if (to_send_.empty()) continue;
      next = std::move(to_send_.front());
      to_send_.pop_front();
    }
    CarryOut(next.first, std::move(next.second));
  }
}

std::uint32_t Card::Gather(Request& request, std::vector<std::byte>& payload) {
  if ((request.work.send_flags & IBV_SEND_INLINE) != 0) {
    payload = std::move(request.inlined);
    return IBV_WC_SUCCESS;
  }
  payload.resize(request.part.length);
  if (payload.empty()) return IBV_WC_SUCCESS;
  return Access(request.domain, request.part.lkey, false, request.part.addr, payload.data(), payload.size(), false);
}

// A read of this card's own memory: NCCL's flush.
std::uint32_t Card::ReadHere(const Request& request) {
  std::vector<std::byte> bytes(request.part.length);
  const std::uint32_t read = Access(request.domain, request.work.wr.rdma.rkey, true, request.work.wr.rdma.remote_addr,
                                    bytes.data(), bytes.size(), false);
  return read != IBV_WC_SUCCESS
             ? read
             : Access(request.domain, request.part.lkey, false, request.part.addr, bytes.data(), bytes.size(), true);
}

void Card::CarryOut(std::uint32_t number, Request request) {
  std::uint32_t peer = 0;
  bool down = false;
  {
    const std::lock_guard lock(mutex_);
    const auto pair = pairs_.find(number);
    if (pair == pairs_.end()) return;
    peer = pair->second->peer;
    down = faults_["down"] != 0;
  }
  const Sent sent{number, request.work.wr_id, OpcodeOf(request.work.opcode), request.signaled};
  if (down) return Complete(sent, IBV_WC_RETRY_EXC_ERR);
  if (request.work.opcode == IBV_WR_RDMA_READ) {
    if (CardOf(peer) != number_) Find("a read of another card's memory, which this stand-in does not do");
    return Complete(sent, CardOf(peer) == number_ ? ReadHere(request) : std::uint32_t{IBV_WC_GENERAL_ERR});
  }
  if (request.work.opcode != IBV_WR_RDMA_WRITE && request.work.opcode != IBV_WR_RDMA_WRITE_WITH_IMM) {
    Find("a request of kind " + std::to_string(request.work.opcode) + ", which this stand-in does not do");
    return Complete(sent, IBV_WC_GENERAL_ERR);
  }
  std::vector<std::byte> payload;
  if (const std::uint32_t gathered = Gather(request, payload); gathered != IBV_WC_SUCCESS) return Complete(sent, gathered);
  Header header;
  header.kind = request.work.opcode == IBV_WR_RDMA_WRITE ? Kind::kWrite : Kind::kWriteWithImm;
  header.to = peer;
  header.key = request.work.wr.rdma.rkey;
  header.address = request.work.wr.rdma.remote_addr;
  header.bytes = payload.size();
  header.imm = request.work.imm_data;
  int fd = -1;
  {
    const std::lock_guard lock(mutex_);
    Link* const link = LinkTo(CardOf(peer));
    if (link != nullptr) {
      fd = link->fd;
      header.ticket = link->next_ticket++;
      link->sent.emplace(header.ticket, sent);
    }
  }
  if (fd < 0) return Complete(sent, IBV_WC_RETRY_EXC_ERR);
  if (!SendAll(fd, &header, sizeof header) || !SendAll(fd, payload.data(), payload.size()))
    ::shutdown(fd, SHUT_RDWR);  // the thread that receives sees its end
}

Card::Link* Card::LinkTo(std::uint32_t card) {
  Link& link = links_[card];
  if (link.fd >= 0) return &link;
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto [name, length] = NameOfCard(card);
  if (fd < 0 || ::connect(fd, reinterpret_cast<const sockaddr*>(&name), length) != 0) {
    if (fd >= 0) ::close(fd);
    return nullptr;
  }
  link.fd = fd;
  epoll_event answers{EPOLLIN, {}};
  answers.data.fd = fd;
  ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &answers);
  return &link;
}

void Card::Complete(const Sent& sent, std::uint32_t status) {
  const std::lock_guard lock(mutex_);
  const auto pair = pairs_.find(sent.pair);
  if (pair == pairs_.end() || (!sent.signaled && status == IBV_WC_SUCCESS)) return;
  ibv_wc completion{};
  completion.wr_id = sent.id;
  completion.status = static_cast<ibv_wc_status>(status);
  completion.opcode = sent.opcode;
  completion.qp_num = sent.pair;
  if (faults_["ack"] == 0 && to_tell_.empty()) return Push(*static_cast<Queue*>(pair->second->send_cq), completion);
  to_tell_.emplace_back(Clock::now(), completion);
  work_.notify_all();
}

void Card::AckLoop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return !to_tell_.empty(); });
    const auto due = [this] { return to_tell_.front().first + std::chrono::microseconds(faults_["ack"]); };
    while (Clock::now() < due()) work_.wait_until(lock, due());
    const ibv_wc completion = to_tell_.front().second;
    to_tell_.pop_front();
    const auto pair = pairs_.find(completion.qp_num);
    if (pair != pairs_.end()) Push(*static_cast<Queue*>(pair->second->send_cq), completion);
  }
}

// ---- receiving
// ---------------------------------------------------------------------------------------------------------------

void Card::ReceiveLoop(int listening) {
  for (;;) {
    std::array<epoll_event, 16> ready{};
    const int count = ::epoll_wait(epoll_, ready.data(), static_cast<int>(ready.size()), -1);
    for (int i = 0; i < count; ++i) {
      const int fd = ready.at(static_cast<std::size_t>(i)).data.fd;
      if (fd != listening) {
        ReadFrom(fd);
        continue;
      }
      const int accepted = ::accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
      epoll_event messages{EPOLLIN, {}};
      messages.data.fd = accepted;
      if (accepted >= 0) ::epoll_ctl(epoll_, EPOLL_CTL_ADD, accepted, &messages);
    }
  }
}

void Card::ReadFrom(int fd) {
  Message message;
  message.from = fd;
  if (!ReceiveAll(fd, &message.header, sizeof message.header)) return Broken(fd);
  message.payload.resize(message.header.kind == Kind::kAnswer ? 0 : message.header.bytes);
  if (!ReceiveAll(fd, message.payload.data(), message.payload.size())) return Broken(fd);
  if (message.header.kind != Kind::kAnswer) return Deliver(std::move(message));
  Sent sent;
  {
    const std::lock_guard lock(mutex_);
    const auto link = std::ranges::find_if(links_, [&](const auto& one) { return one.second.fd == fd; });
    if (link == links_.end()) return;
    const auto at = link->second.sent.find(message.header.ticket);
    if (at == link->second.sent.end()) return;
    sent = at->second;
    link->second.sent.erase(at);
  }
  Complete(sent, message.header.status);
}

void Card::Deliver(Message message) {
  const std::lock_guard lock(mutex_);
  const auto pair = pairs_.find(message.header.to);
  if (pair == pairs_.end()) return Answer(message, IBV_WC_RETRY_EXC_ERR);
  if (!pair->second->held.empty() || !Apply(*pair->second, message)) pair->second->held.push_back(std::move(message));
}

// False: it waits for a receive.
bool Card::Apply(Pair& pair, Message& message) {
  const bool imm = message.header.kind == Kind::kWriteWithImm;
  if (imm && pair.receives.empty()) return false;
  const std::uint32_t status = message.payload.empty() ? std::uint32_t{IBV_WC_SUCCESS}
                                                       : Access(pair.pd, message.header.key, true, message.header.address,
                                                                message.payload.data(), message.payload.size(), true);
  if (imm && status == IBV_WC_SUCCESS) {
    ibv_wc completion{};
    completion.wr_id = pair.receives.front();
    completion.status = IBV_WC_SUCCESS;
    completion.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
    completion.byte_len = static_cast<std::uint32_t>(message.payload.size());
    completion.imm_data = message.header.imm;
    completion.qp_num = pair.qp_num;
    completion.wc_flags = IBV_WC_WITH_IMM;
    pair.receives.pop_front();
    Push(*static_cast<Queue*>(pair.recv_cq), completion);
  }
  Answer(message, status);
  return true;
}

void Card::Answer(const Message& message, std::uint32_t status) {
  Header answer;
  answer.kind = Kind::kAnswer;
  answer.ticket = message.header.ticket;
  answer.status = status;
  static_cast<void>(SendAll(message.from, &answer, sizeof answer));
}

// The other end is gone: what it has not answered fails, as after a card's last try.
void Card::Broken(int fd) {
  std::map<std::uint64_t, Sent> lost;
  {
    const std::lock_guard lock(mutex_);
    ::epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
    const auto link = std::ranges::find_if(links_, [&](const auto& one) { return one.second.fd == fd; });
    if (link != links_.end()) {
      lost = std::move(link->second.sent);
      links_.erase(link);
    }
    for (auto& [number, pair] : pairs_) std::erase_if(pair->held, [&](const Message& message) { return message.from == fd; });
    ::close(fd);
  }
  for (const auto& [ticket, sent] : lost) Complete(sent, IBV_WC_RETRY_EXC_ERR);
}

}  // namespace amem::card
