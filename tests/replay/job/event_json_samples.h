// What event_json.h promises to programs: every kind of event with a value other than the default in every field
// (tests/journal/samples.h). Fields may be added; names, forms and order stay.
#pragma once

namespace amem::test {

// clang-format off
inline constexpr const char* kSampleEvents[] = {
    R"json({"seq":1,"time_ns":2,"thread":3,"kind":"session-opened","session":"7ffffffffffffffe","host":"text 2\u0000 \ufffd","pid":-4,"boot_id":"text 4\u0000 \ufffd","amem_version":"text 5\u0000 \ufffd","driver_version":"text 6\u0000 \ufffd","nccl_version":"text 7\u0000 \ufffd","gpu_uuids":["text 8\u0000 \ufffd","text 9\u0000 \ufffd","text 10\u0000 \ufffd"],"group":9223372036854775796,"rank":-13,"realtime_ns":9223372036854775794,"monotonic_ns":9223372036854775793,"layout":"text 15\u0000 \ufffd","content":"text 16\u0000 \ufffd"})json",
    R"json({"seq":2,"time_ns":2,"thread":3,"kind":"session-closed","reason":"text 1\u0000 \ufffd"})json",
    R"json({"seq":3,"time_ns":2,"thread":3,"kind":"session-broken","reason":"text 1\u0000 \ufffd"})json",
    R"json({"seq":4,"time_ns":2,"thread":3,"kind":"group-changed","group":9223372036854775806})json",
    R"json({"seq":5,"time_ns":2,"thread":3,"kind":"library-attached","path":"text 1\u0000 \ufffd","build_id":"text 2\u0000 \ufffd","way":"text 3\u0000 \ufffd","nccl_version":"text 4\u0000 \ufffd","load_address":"0x7ffffffffffffffa"})json",
    R"json({"seq":6,"time_ns":2,"thread":3,"kind":"driver-symbol-bound","name":"text 1\u0000 \ufffd","cuda_version":-3,"replaced":true})json",
    R"json({"seq":7,"time_ns":2,"thread":3,"kind":"range-reserved","allocation":9223372036854775796,"address":"0x7ffffffffffffffe","bytes":9223372036854775805,"alignment":9223372036854775804,"hint":"0x7ffffffffffffffb","flags":9223372036854775802,"site":["0x7ffffffffffffff9","0x7ffffffffffffff8","0x7ffffffffffffff7","0x7ffffffffffffff6","0x7ffffffffffffff5"]})json",
    R"json({"seq":8,"time_ns":2,"thread":3,"kind":"range-freed","address":"0x7ffffffffffffffe","bytes":9223372036854775805,"allocation":9223372036854775804})json",
    R"json({"seq":9,"time_ns":2,"thread":3,"kind":"allocation-created","allocation":9223372036854775806,"bytes":9223372036854775805,"properties":{"type":4294967292,"handle_types":4294967291,"location":{"type":1,"id":-6},"compression":249,"gpu_direct_rdma":248,"usage":65527,"reserved":4294967286},"flags":9223372036854775797,"handle":"0x7ffffffffffffff4","created_seq":9223372036854775790,"site":["0x7ffffffffffffff3","0x7ffffffffffffff2","0x7ffffffffffffff1","0x7ffffffffffffff0","0x7fffffffffffffef"],"tag":"user"})json",
    R"json({"seq":10,"time_ns":2,"thread":3,"kind":"allocation-retained","allocation":9223372036854775806,"address":"0x7ffffffffffffffd"})json",
    R"json({"seq":11,"time_ns":2,"thread":3,"kind":"allocation-released","allocation":9223372036854775806})json",
    R"json({"seq":12,"time_ns":2,"thread":3,"kind":"mapped","address":"0x7ffffffffffffffe","bytes":9223372036854775805,"offset":9223372036854775804,"allocation":9223372036854775803,"flags":9223372036854775802})json",
    R"json({"seq":13,"time_ns":2,"thread":3,"kind":"unmapped","address":"0x7ffffffffffffffe","bytes":9223372036854775805,"allocation":9223372036854775804})json",
    R"json({"seq":14,"time_ns":2,"thread":3,"kind":"access-set","allocation":9223372036854775798,"address":"0x7ffffffffffffffe","bytes":9223372036854775805,"access":[{"location":{"type":1,"id":-4},"flags":4294967291},{"location":{"type":1,"id":-6},"flags":4294967289},{"location":{"type":1,"id":-8},"flags":4294967287}]})json",
    R"json({"seq":15,"time_ns":2,"thread":3,"kind":"exported","allocation":9223372036854775806,"handle_type":4294967293})json",
    R"json({"seq":16,"time_ns":2,"thread":3,"kind":"imported","allocation":9223372036854775806,"owner":"7ffffffffffffffd","owner_allocation":9223372036854775804,"bytes":9223372036854775803,"properties":{"type":4294967290,"handle_types":4294967289,"location":{"type":1,"id":-8},"compression":247,"gpu_direct_rdma":246,"usage":65525,"reserved":4294967284},"handle_type":4294967283,"handle":"0x7ffffffffffffff2","created_seq":9223372036854775788,"site":["0x7ffffffffffffff1","0x7ffffffffffffff0","0x7fffffffffffffef","0x7fffffffffffffee","0x7fffffffffffffed"],"tag":"user"})json",
    R"json({"seq":17,"time_ns":2,"thread":3,"kind":"reference-added","allocation":9223372036854775806,"by":"7ffffffffffffffd","as":9223372036854775804})json",
    R"json({"seq":18,"time_ns":2,"thread":3,"kind":"reference-dropped","allocation":9223372036854775806,"by":"7ffffffffffffffd","as":9223372036854775804})json",
    R"json({"seq":19,"time_ns":2,"thread":3,"kind":"peer-connected","peer":"7ffffffffffffffe","host":"text 2\u0000 \ufffd","pid":-4,"group":9223372036854775803,"rank":-6})json",
    R"json({"seq":20,"time_ns":2,"thread":3,"kind":"peer-lost","peer":"7ffffffffffffffe","reason":"text 2\u0000 \ufffd"})json",
    R"json({"seq":21,"time_ns":2,"thread":3,"kind":"host-allocated","address":"0x7ffffffffffffffe","bytes":9223372036854775805,"flags":4294967292,"registered":true})json",
    R"json({"seq":22,"time_ns":2,"thread":3,"kind":"host-freed","address":"0x7ffffffffffffffe"})json",
    R"json({"seq":23,"time_ns":2,"thread":3,"kind":"legacy-allocated","address":"0x7ffffffffffffffe","bytes":9223372036854775805,"backing":9223372036854775804,"offset":9223372036854775803,"why":"text 5\u0000 \ufffd","site":["0x7ffffffffffffff9","0x7ffffffffffffff8","0x7ffffffffffffff7","0x7ffffffffffffff6","0x7ffffffffffffff5"]})json",
    R"json({"seq":24,"time_ns":2,"thread":3,"kind":"legacy-freed","address":"0x7ffffffffffffffe"})json",
    R"json({"seq":25,"time_ns":2,"thread":3,"kind":"legacy-exported","address":"0x7ffffffffffffffe","backing":9223372036854775805})json",
    R"json({"seq":26,"time_ns":2,"thread":3,"kind":"legacy-imported","address":"0x7ffffffffffffffe","allocation":9223372036854775805})json",
    R"json({"seq":27,"time_ns":2,"thread":3,"kind":"legacy-closed","address":"0x7ffffffffffffffe"})json",
    R"json({"seq":28,"time_ns":2,"thread":3,"kind":"async-allocated","address":"0x7ffffffffffffffe","bytes":9223372036854775805})json",
    R"json({"seq":29,"time_ns":2,"thread":3,"kind":"async-freed","address":"0x7ffffffffffffffe"})json",
    R"json({"seq":30,"time_ns":2,"thread":3,"kind":"multicast-created","allocation":9223372036854775806,"bytes":9223372036854775805,"devices":4294967292,"handle_types":4294967291,"flags":9223372036854775802,"handle":"0x7ffffffffffffff9"})json",
    R"json({"seq":31,"time_ns":2,"thread":3,"kind":"multicast-device-added","multicast":9223372036854775806,"device":-3})json",
    R"json({"seq":32,"time_ns":2,"thread":3,"kind":"multicast-bound","multicast":9223372036854775806,"multicast_offset":9223372036854775805,"allocation":9223372036854775804,"allocation_offset":9223372036854775803,"bytes":9223372036854775802,"address":"0x7ffffffffffffff9"})json",
    R"json({"seq":33,"time_ns":2,"thread":3,"kind":"multicast-unbound","multicast":9223372036854775806,"device":-3,"multicast_offset":9223372036854775804,"bytes":9223372036854775803})json",
    R"json({"seq":34,"time_ns":2,"thread":3,"kind":"registered","address":"0x7ffffffffffffffe","bytes":9223372036854775805,"how":"text 3\u0000 \ufffd"})json",
    R"json({"seq":35,"time_ns":2,"thread":3,"kind":"deregistered","address":"0x7ffffffffffffffe","bytes":9223372036854775805})json",
    R"json({"seq":36,"time_ns":2,"thread":3,"kind":"passed-through","name":"text 1\u0000 \ufffd","detail":"text 2\u0000 \ufffd","result":-4})json",
    R"json({"seq":37,"time_ns":2,"thread":3,"kind":"cycle-begun","cycle_kind":"resume","cycle":9223372036854775806,"members":["7ffffffffffffffd","7ffffffffffffffc","7ffffffffffffffb"]})json",
    R"json({"seq":38,"time_ns":2,"thread":3,"kind":"step-begun","step":{"kind":"save","allocation":9223372036854775806,"address":"0x7ffffffffffffffd","bytes":9223372036854775804,"device":-5}})json",
    R"json({"seq":39,"time_ns":2,"thread":3,"kind":"step-done","step":{"kind":"save","allocation":9223372036854775806,"address":"0x7ffffffffffffffd","bytes":9223372036854775804,"device":-5}})json",
    R"json({"seq":40,"time_ns":2,"thread":3,"kind":"step-failed","step":{"kind":"save","allocation":9223372036854775806,"address":"0x7ffffffffffffffd","bytes":9223372036854775804,"device":-5},"code":"invalid","driver_result":-6,"message":"text 6\u0000 \ufffd"})json",
    R"json({"seq":41,"time_ns":2,"thread":3,"kind":"phase-begun","phase":"pause: save"})json",
    R"json({"seq":42,"time_ns":2,"thread":3,"kind":"phase-decided","phase":"pause: save","passed":false,"culprit":"7ffffffffffffffe","message":"text 2\u0000 \ufffd"})json",
    R"json({"seq":43,"time_ns":2,"thread":3,"kind":"cycle-done","cycle_kind":"resume","cycle":9223372036854775806,"duration_ns":9223372036854775805})json",
    R"json({"seq":44,"time_ns":2,"thread":3,"kind":"cycle-failed","cycle_kind":"resume","cycle":9223372036854775806,"undone":false,"message":"text 2\u0000 \ufffd"})json",
    R"json({"seq":45,"time_ns":2,"thread":3,"kind":"condensed","through":9223372036854775806,"next_allocation":9223372036854775805,"cycles":9223372036854775804,"totals":[9223372036854775803,9223372036854775802,9223372036854775801]})json",
    R"json({"seq":46,"time_ns":2,"thread":3,"kind":"slab-opened","slab":9223372036854775806,"address":"0x7ffffffffffffffd"})json",
    R"json({"seq":47,"time_ns":2,"thread":3,"kind":"placed","allocation":9223372036854775806,"slab":9223372036854775805,"offset":9223372036854775804})json",
    R"json({"seq":48,"time_ns":2,"thread":3,"kind":"backed","allocation":9223372036854775806,"handle":"0x7ffffffffffffffd"})json",
    R"json({"seq":49,"time_ns":2,"thread":3,"kind":"part-cleared","slab":9223372036854775806,"offset":9223372036854775805,"bytes":9223372036854775804})json",
};
// clang-format on

}  // namespace amem::test
