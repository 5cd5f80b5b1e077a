// libibverbs.so.1 as NCCL calls it, over the stand-in card: devices with one active InfiniBand port each.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "tests/stand_ins/verbs/card.h"

// In the header these are macros around inline functions.
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova2
#undef ibv_reg_mr_iova

namespace {

using amem::card::Card;
using amem::card::Pair;
using amem::card::Queue;
using amem::card::Region;

constexpr std::size_t kPortAttributes = offsetof(ibv_port_attr, port_cap_flags2);  // what the exported ibv_query_port fills in

// How many cards there are: AMEM_SIM_CARDS, or one.
std::vector<ibv_device>& Devices() {
  static std::vector<ibv_device> devices = [] {
    const char* const wanted = std::getenv("AMEM_SIM_CARDS");
    std::vector<ibv_device> made(static_cast<std::size_t>(std::clamp(wanted == nullptr ? 1 : std::atoi(wanted), 1, 8)));
    for (std::size_t number = 0; number < made.size(); ++number) {
      ibv_device& device = made[number];
      device.node_type = IBV_NODE_CA;
      device.transport_type = IBV_TRANSPORT_IB;
      std::snprintf(device.name, sizeof device.name, "amem_card%zu", number);
      std::snprintf(device.dev_name, sizeof device.dev_name, "uverbs-amem%zu", number);
    }
    return made;
  }();
  return devices;
}

int PostSend(ibv_qp* pair, ibv_send_wr* work, ibv_send_wr** bad) {
  return Card::Get().Send(static_cast<Pair*>(pair), work, bad);
}
int PostReceive(ibv_qp* pair, ibv_recv_wr* work, ibv_recv_wr** bad) {
  return Card::Get().Receive(static_cast<Pair*>(pair), work, bad);
}
int PollQueue(ibv_cq* queue, int most, ibv_wc* completions) {
  return Card::Poll(static_cast<Queue*>(queue), most, completions);
}

}  // namespace

extern "C" {

ibv_device** ibv_get_device_list(int* count) {
  std::vector<ibv_device>& devices = Devices();
  auto** const list = static_cast<ibv_device**>(std::calloc(devices.size() + 1, sizeof(ibv_device*)));
  std::ranges::transform(devices, list, [](ibv_device& device) { return &device; });
  if (count != nullptr) *count = static_cast<int>(devices.size());
  return list;
}
void ibv_free_device_list(ibv_device** list) { std::free(list); }
const char* ibv_get_device_name(ibv_device* device) { return device->name; }

ibv_context* ibv_open_device(ibv_device* device) {
  auto* const context = new ibv_context{};
  context->device = device;
  context->ops.post_send = PostSend;
  context->ops.post_recv = PostReceive;
  context->ops.poll_cq = PollQueue;
  context->cmd_fd = context->async_fd = -1;
  context->num_comp_vectors = 1;
  return context;
}
int ibv_close_device(ibv_context* context) {
  delete context;
  return 0;
}

// Nothing ever happens to this card. NCCL has a thread of its own wait here.
int ibv_get_async_event(ibv_context*, ibv_async_event*) {
  for (;;) ::pause();
}
void ibv_ack_async_event(ibv_async_event*) {}
const char* ibv_event_type_str(ibv_event_type) { return "an event of the stand-in card"; }
int ibv_fork_init() { return 0; }

int ibv_query_device(ibv_context* context, ibv_device_attr* attributes) {
  std::memset(attributes, 0, sizeof *attributes);
  std::snprintf(attributes->fw_ver, sizeof attributes->fw_ver, "stand-in");
  const auto number = static_cast<std::uint64_t>(context->device - Devices().data());
  attributes->node_guid = attributes->sys_image_guid = 0xa3e3 + number;
  attributes->max_mr_size = ~std::uint64_t{0};
  attributes->max_qp = attributes->max_cq = attributes->max_mr = attributes->max_pd = 1 << 14;
  attributes->max_qp_wr = attributes->max_cqe = 1 << 16;
  attributes->max_sge = 1;
  attributes->phys_port_cnt = 1;
  return 0;
}
int ibv_query_port(ibv_context*, std::uint8_t, struct _compat_ibv_port_attr* filled) {
  ibv_port_attr port{};
  port.state = IBV_PORT_ACTIVE;
  port.max_mtu = port.active_mtu = IBV_MTU_4096;
  port.gid_tbl_len = port.pkey_tbl_len = 1;
  port.max_msg_sz = 1U << 31;
  port.lid = 1;
  port.active_width = 2;   // four lanes
  port.active_speed = 32;  // of 25 Gb/s
  port.phys_state = 5;
  port.link_layer = IBV_LINK_LAYER_INFINIBAND;
  std::memcpy(filled, &port, kPortAttributes);
  return 0;
}
int ibv_query_gid(ibv_context*, std::uint8_t, int, ibv_gid* gid) {
  std::memset(gid, 0, sizeof *gid);
  gid->raw[0] = 0xfe;
  gid->raw[1] = 0x80;
  gid->raw[15] = 1;
  return 0;
}

int ibv_query_pkey(ibv_context*, std::uint8_t, int, __be16* key) {
  *key = 0xffff;  // the default partition
  return 0;
}

ibv_pd* ibv_alloc_pd(ibv_context* context) { return new ibv_pd{context, 0}; }
int ibv_dealloc_pd(ibv_pd* domain) {
  delete domain;
  return 0;
}

ibv_mr* ibv_reg_mr_iova2(ibv_pd* domain, void* address, std::size_t bytes, std::uint64_t iova, unsigned) {
  return Card::Get().Register(domain, reinterpret_cast<std::uint64_t>(address), bytes, iova, -1);
}
ibv_mr* ibv_reg_mr(ibv_pd* domain, void* address, std::size_t bytes, int access) {
  return ibv_reg_mr_iova2(domain, address, bytes, reinterpret_cast<std::uint64_t>(address), static_cast<unsigned>(access));
}
// The memory of a dma-buf is found by its address, which NCCL gives as the IO address.
ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* domain, std::uint64_t, std::size_t bytes, std::uint64_t iova, int descriptor, int) {
  if (descriptor < 0) {
    errno = EBADF;
    return nullptr;
  }
  return Card::Get().Register(domain, iova, bytes, iova, descriptor);
}
int ibv_dereg_mr(ibv_mr* region) { return Card::Get().Deregister(static_cast<Region*>(region)); }

ibv_cq* ibv_create_cq(ibv_context* context, int entries, void* own, ibv_comp_channel* channel, int) {
  auto* const queue = new Queue;
  queue->context = context;
  queue->channel = channel;
  queue->cq_context = own;
  queue->cqe = entries;
  return queue;
}
int ibv_destroy_cq(ibv_cq* queue) {
  delete static_cast<Queue*>(queue);
  return 0;
}

ibv_qp* ibv_create_qp(ibv_pd* domain, ibv_qp_init_attr* wanted) { return Card::Get().MakePair(domain, *wanted); }
int ibv_modify_qp(ibv_qp* pair, ibv_qp_attr* attributes, int mask) {
  Card::Get().Connect(static_cast<Pair*>(pair), *attributes, mask);
  return 0;
}
int ibv_query_qp(ibv_qp* pair, ibv_qp_attr* attributes, int, ibv_qp_init_attr*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->qp_state = pair->state;
  attributes->dest_qp_num = static_cast<Pair*>(pair)->peer;
  return 0;
}
int ibv_destroy_qp(ibv_qp* pair) {
  Card::Get().DestroyPair(static_cast<Pair*>(pair));
  return 0;
}

// For tests: bytes and regions of GPU memory that are registered now, registrations and deregistrations ever, requests,
// findings.
void amem_card_counts(std::uint64_t counts[6]) {
  const auto now = Card::Get().Count();
  const std::array values = {now.gpu_bytes,       now.gpu_regions, now.registrations,
                             now.deregistrations, now.requests,    now.findings};
  std::memcpy(counts, values.data(), sizeof values);
}
// For tests: faults as in AMEM_SIM_CARD_FAULTS, from now on.
void amem_card_fault(const char* faults) { Card::Get().Plan(faults); }

}  // extern "C"
