const place = document.querySelector('main'), note = document.querySelector('#note');
const events = new EventSource('events');
events.onmessage = event => { place.innerHTML = JSON.parse(event.data); document.body.className = ''; note.textContent = ''; };
events.onerror = () => { document.body.className = 'away'; note.textContent = 'The daemon does not answer; trying again.'; };
