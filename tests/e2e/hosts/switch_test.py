"""What the switch between test hosts does with packets; needs no rights."""

import ipaddress
import unittest

from switch import Switch


def packet_to(address, text=b""):
    """The parts of an IP header that the switch looks at."""
    at = ipaddress.ip_address(address)
    return (b"\x45" + bytes(15) if at.version == 4 else b"\x60" + bytes(23)) + at.packed + text


class Carrying(unittest.TestCase):
    def setUp(self):
        self.sent = []
        self.switch = Switch({"a": [10, "10.77.0.1"], "b": [11, "10.77.0.2"], "c": [12, "fd77::3"]},
                             lambda fd, packet: self.sent.append((fd, packet)))

    def carry(self, source, packet, now=0.0):
        self.switch.carry(source, packet, now)
        sent, self.sent[:] = list(self.sent), []
        return sent

    def shape(self, one, other, **how):
        self.switch.change({"pair": [one, other], **how})

    def test_packets_of_both_families_go_to_the_host_with_the_address(self):
        self.assertEqual(self.carry("a", packet_to("10.77.0.2")), [(11, packet_to("10.77.0.2"))])
        self.assertEqual(self.carry("a", packet_to("fd77::3")), [(12, packet_to("fd77::3"))])
        self.assertEqual(self.carry("a", packet_to("10.77.0.9")), [])
        self.assertEqual(self.carry("a", b""), [])
        self.assertEqual(self.carry("a", packet_to("fd77::3")[:20]), [])

    def test_cut_is_of_one_direction(self):
        self.shape("a", "b", cut=True)
        self.assertEqual(self.carry("a", packet_to("10.77.0.2")), [])
        self.assertEqual(len(self.carry("b", packet_to("10.77.0.1"))), 1)
        self.shape("a", "b", cut=False)
        self.assertEqual(len(self.carry("a", packet_to("10.77.0.2"))), 1)

    def test_cut_takes_what_is_under_way_too(self):
        self.shape("a", "b", delay=1.0)
        self.carry("a", packet_to("10.77.0.2"))
        self.shape("a", "b", cut=True)
        self.switch.deliver(5.0)
        self.assertEqual(self.sent, [])

    def test_delay_keeps_the_order_and_jitter_does_not(self):
        packets = [packet_to("10.77.0.2", bytes([i])) for i in range(50)]
        for jitter in (0.0, 0.2):
            self.shape("a", "b", delay=0.1, jitter=jitter)
            for packet in packets:
                self.assertEqual(self.carry("a", packet, now=1.0), [])
            self.assertGreaterEqual(self.switch.deliver(1.05), 0.05 - 1e-9)
            self.assertEqual(self.sent, [])
            self.assertIsNone(self.switch.deliver(1.31))
            arrived = [packet for _, packet in self.sent]
            self.sent.clear()
            self.assertCountEqual(arrived, packets)
            self.assertEqual(arrived == packets, jitter == 0.0)

    def test_loss_is_about_the_share_and_the_same_every_time(self):
        self.shape("a", "b", loss=0.05)
        arrived = sum(len(self.carry("a", packet_to("10.77.0.2"))) for _ in range(4000))
        self.assertGreater(arrived, 3700)
        self.assertLess(arrived, 3900)
        again = Switch({"a": [10, "10.77.0.1"], "b": [11, "10.77.0.2"]},
                       lambda fd, packet: self.sent.append((fd, packet)))
        again.change({"pair": ["a", "b"], "loss": 0.05})
        for _ in range(4000):
            again.carry("a", packet_to("10.77.0.2"), 0.0)
        self.assertEqual(len(self.sent), arrived)

    def test_host_that_is_down_gets_nothing_until_it_is_back_under_another_address(self):
        self.switch.change({"down": "b"})
        self.assertEqual(self.carry("a", packet_to("10.77.0.2")), [])
        self.assertEqual(self.carry("b", packet_to("10.77.0.1")), [])
        self.switch.change({"address": ["b", "10.77.0.40"], "up": "b"})
        self.assertEqual(self.carry("a", packet_to("10.77.0.2")), [])
        self.assertEqual(self.carry("a", packet_to("10.77.0.40"))[0][0], 11)


if __name__ == "__main__":
    unittest.main()
